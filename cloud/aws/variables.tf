variable "region" {
  description = "The AWS region in which all of this is made."
  type        = string
}

variable "name" {
  description = "Begins the name of everything that is made here: lower case letters, digits, hyphens."
  type        = string
  default     = "solorl"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "The name must have 2 to 31 lower case letters, digits or hyphens and begin with a letter."
  }
}

variable "bucket" {
  description = "Name of the bucket that is made for the studies; it must be free in all of AWS."
  type        = string
}

variable "prefix" {
  description = "The folder of the bucket in which studies lie; jobs can read and write nothing else."
  type        = string
  default     = "studies"
  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9/_-]*[A-Za-z0-9]$", var.prefix))
    error_message = "The prefix must be a path such as studies or team/studies, without a slash at its ends."
  }
}

variable "image" {
  description = "The image that jobs run, with its tag or digest, such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/solorl:1."
  type        = string
}

variable "repository" {
  description = "Name of the ECR repository that holds the image; empty: the image is public."
  type        = string
  default     = ""
}

variable "instance_types" {
  description = "What may be rented. More families: cheaper, and fewer interruptions."
  type        = list(string)
  default     = ["c7i", "c7a", "c6i", "c6a", "m7i", "m7a"]
}

variable "max_vcpus" {
  description = "How many virtual cores may be rented at once. It bounds the costs."
  type        = number
  default     = 64
}

variable "subnet_ids" {
  description = "Subnets for the machines; they must reach the internet, or endpoints for ECR, ECS, logs and S3. Empty: those of the default VPC."
  type        = list(string)
  default     = []
}

variable "cores" {
  description = "Virtual cores of a job, unless its task says otherwise."
  type        = number
  default     = 1
}

variable "memory" {
  description = "MiB of memory of a job, unless its task says otherwise."
  type        = number
  default     = 4096
}

variable "gpus" {
  description = "GPUs of a job; with 1 or more, instance_types must be such as g6."
  type        = number
  default     = 0
}

variable "attempts" {
  description = "How often a job is started at most, interruptions included; AWS allows 10."
  type        = number
  default     = 10
}

variable "log_days" {
  description = "Days for which logs are kept."
  type        = number
  default     = 30
}
