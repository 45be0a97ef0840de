# Spot machines that Batch rents while jobs wait, and gives back when none does.

data "aws_vpc" "default" {
  count   = length(var.subnet_ids) == 0 ? 1 : 0
  default = true
}

data "aws_subnets" "default" {
  count = length(var.subnet_ids) == 0 ? 1 : 0
  filter {
    name   = "vpc-id"
    values = [data.aws_vpc.default[0].id]
  }
}

locals {
  subnets = length(var.subnet_ids) == 0 ? data.aws_subnets.default[0].ids : var.subnet_ids
  gpu     = var.gpus == 0 ? [] : [{ type = "GPU", value = tostring(var.gpus) }]
}

data "aws_subnet" "first" {
  id = local.subnets[0]
}

resource "aws_security_group" "machine" {
  name        = "${var.name}-machine"
  description = "Machines of ${var.name}: they call others, nobody calls them."
  vpc_id      = data.aws_subnet.first.vpc_id
  egress {
    description = "HTTPS: image, bucket, logs, the services of AWS"
    from_port   = 443
    to_port     = 443
    protocol    = "tcp"
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_launch_template" "machine" {
  name = "${var.name}-machine"
  # One hop: the machine itself reaches its role, a container does not.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  # A container is told when its spot machine is taken away, and has most of the two minutes to save: AWS's default is
  # not to tell, and 30 seconds.
  user_data = base64encode(<<-EOT
    MIME-Version: 1.0
    Content-Type: multipart/mixed; boundary="==solorl=="

    --==solorl==
    Content-Type: text/x-shellscript; charset="us-ascii"

    #!/bin/sh
    echo ECS_ENABLE_SPOT_INSTANCE_DRAINING=true >> /etc/ecs/ecs.config
    echo ECS_CONTAINER_STOP_TIMEOUT=110s >> /etc/ecs/ecs.config
    --==solorl==--
  EOT
  )
  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = 60
      volume_type           = "gp3"
      encrypted             = "true"
      delete_on_termination = "true"
    }
  }
}

# No service_role: Batch then uses its own role AWSServiceRoleForBatch, which AWS keeps.
resource "aws_batch_compute_environment" "spot" {
  name_prefix = "${var.name}-"
  type        = "MANAGED"
  compute_resources {
    type                = "SPOT"
    allocation_strategy = "SPOT_PRICE_CAPACITY_OPTIMIZED"
    min_vcpus           = 0
    max_vcpus           = var.max_vcpus
    instance_type       = var.instance_types
    instance_role       = aws_iam_instance_profile.machine.arn
    subnets             = local.subnets
    security_group_ids  = [aws_security_group.machine.id]
    launch_template {
      launch_template_id = aws_launch_template.machine.id
      version            = aws_launch_template.machine.latest_version
    }
  }
  # A change that needs a new environment makes that first, because the queue needs one.
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy.machine]
}

resource "aws_batch_job_queue" "this" {
  name     = var.name
  state    = "ENABLED"
  priority = 1
  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.spot.arn
  }
}

resource "aws_cloudwatch_log_group" "jobs" {
  name              = "/solorl/${var.name}"
  retention_in_days = var.log_days
}

resource "aws_batch_job_definition" "worker" {
  name                  = var.name
  type                  = "container"
  platform_capabilities = ["EC2"]
  propagate_tags        = true
  container_properties = jsonencode({
    image      = var.image
    command    = ["--help"] # every job brings its own: work STORAGE
    jobRoleArn = aws_iam_role.job.arn
    user       = "1000:1000"
    resourceRequirements = concat([
      { type = "VCPU", value = tostring(var.cores) },
      { type = "MEMORY", value = tostring(var.memory) },
    ], local.gpu)
    environment = [{ name = "AWS_DEFAULT_REGION", value = var.region }]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.jobs.name
        awslogs-region        = var.region
        awslogs-stream-prefix = "work"
      }
    }
  })
  # A machine that was taken away, a worker that saved and says "run me again" (75), and one that was killed (137, as by
  # a lack of memory) start again. How often a task may fail, the workers count.
  retry_strategy {
    attempts = var.attempts
    evaluate_on_exit {
      action           = "RETRY"
      on_status_reason = "Host EC2*"
    }
    evaluate_on_exit {
      action       = "RETRY"
      on_exit_code = "75"
    }
    evaluate_on_exit {
      action       = "RETRY"
      on_exit_code = "137"
    }
    evaluate_on_exit {
      action    = "EXIT"
      on_reason = "*"
    }
  }
}
