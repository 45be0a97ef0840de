# Who may do what. Each action has the reason for which it is needed.

data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

locals {
  account = data.aws_caller_identity.this.account_id
  arn     = "arn:${data.aws_partition.this.partition}"
  studies = "${aws_s3_bucket.studies.arn}/${var.prefix}/*"
}

# The job: the training and its worker. The studies, and nothing else.

data "aws_iam_policy_document" "task_trust" {
  statement {
    actions = [
      "sts:AssumeRole", # the container service takes the role for the job's container
    ]
    principals {
      type        = "Service"
      identifiers = ["ecs-tasks.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

data "aws_iam_policy_document" "study" {
  statement {
    actions = [
      "s3:GetObject",            # plan, script, the newest checkpoint
      "s3:PutObject",            # lease, metrics, checkpoints, result
      "s3:DeleteObject",         # leases that have ended, checkpoints that are too old
      "s3:AbortMultipartUpload", # a large object of which a part could not be sent
    ]
    resources = [local.studies]
  }
  statement {
    actions = [
      "s3:ListBucket", # which results, leases and checkpoints exist
    ]
    # Without a condition on the prefix: S3 answers "forbidden" instead of "not found" for an object that is absent to
    # whoever may not list the whole bucket.
    resources = [aws_s3_bucket.studies.arn]
  }
}

resource "aws_iam_role" "job" {
  name               = "${var.name}-job"
  assume_role_policy = data.aws_iam_policy_document.task_trust.json
}

resource "aws_iam_role_policy" "job" {
  name   = "study"
  role   = aws_iam_role.job.id
  policy = data.aws_iam_policy_document.study.json
}

# The machine: joins the cluster that Batch made, fetches the image, writes logs. Jobs cannot take this role (compute.tf).

data "aws_iam_policy_document" "machine_trust" {
  statement {
    actions = [
      "sts:AssumeRole", # EC2 gives the role to the machines that Batch rents
    ]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "machine" {
  statement {
    actions = [
      "ecs:RegisterContainerInstance",     # join the cluster
      "ecs:DeregisterContainerInstance",   # leave it
      "ecs:SubmitContainerStateChange",    # say that a container has started or ended
      "ecs:SubmitTaskStateChange",         # the same of a task
      "ecs:SubmitAttachmentStateChanges",  # the same of a network interface
      "ecs:StartTelemetrySession",         # the agent's health, without which Batch takes the machine for broken
      "ecs:UpdateContainerInstancesState", # drain before a spot machine is taken away
      "ecs:Poll",                          # hear what to start
    ]
    # Batch makes the cluster and chooses its name, after the compute environment's.
    resources = [
      "${local.arn}:ecs:${var.region}:${local.account}:cluster/*",
      "${local.arn}:ecs:${var.region}:${local.account}:container-instance/*",
      "${local.arn}:ecs:${var.region}:${local.account}:task/*",
    ]
  }
  statement {
    actions = [
      "ecs:DiscoverPollEndpoint", # where to hear it; AWS knows this right for all resources only
    ]
    resources = ["*"]
  }
  statement {
    actions = [
      "logs:CreateLogStream", # a stream for each attempt
      "logs:PutLogEvents",    # its lines
    ]
    resources = ["${aws_cloudwatch_log_group.jobs.arn}:*"]
  }
}

data "aws_iam_policy_document" "image" {
  count = var.repository == "" ? 0 : 1
  statement {
    actions = [
      "ecr:GetAuthorizationToken", # log in to the registry; AWS knows this right for all resources only
    ]
    resources = ["*"]
  }
  statement {
    actions = [
      "ecr:BatchCheckLayerAvailability", # which layers there are
      "ecr:BatchGetImage",               # the image's manifest
      "ecr:GetDownloadUrlForLayer",      # its layers
    ]
    resources = ["${local.arn}:ecr:${var.region}:${local.account}:repository/${var.repository}"]
  }
}

resource "aws_iam_role" "machine" {
  name               = "${var.name}-machine"
  assume_role_policy = data.aws_iam_policy_document.machine_trust.json
}

resource "aws_iam_role_policy" "machine" {
  name   = "machine"
  role   = aws_iam_role.machine.id
  policy = data.aws_iam_policy_document.machine.json
}

resource "aws_iam_role_policy" "image" {
  count  = var.repository == "" ? 0 : 1
  name   = "image"
  role   = aws_iam_role.machine.id
  policy = data.aws_iam_policy_document.image[0].json
}

resource "aws_iam_instance_profile" "machine" {
  name = "${var.name}-machine"
  role = aws_iam_role.machine.name
}

# The person, or the machine, that runs `solo bench --engine aws`: attach this policy to their user or role.

data "aws_iam_policy_document" "submit" {
  source_policy_documents = [data.aws_iam_policy_document.study.json]
  statement {
    actions = [
      "batch:SubmitJob", # start workers; all else is read from and written to the bucket
    ]
    resources = [
      aws_batch_job_queue.this.arn,
      # a definition is named with and without its revision
      "${local.arn}:batch:${var.region}:${local.account}:job-definition/${aws_batch_job_definition.worker.name}",
      "${local.arn}:batch:${var.region}:${local.account}:job-definition/${aws_batch_job_definition.worker.name}:*",
    ]
  }
}

resource "aws_iam_policy" "submit" {
  name        = "${var.name}-submit"
  description = "Start workers, and read and write the files of studies."
  policy      = data.aws_iam_policy_document.submit.json
}
