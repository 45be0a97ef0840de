output "storage" {
  description = "Where studies lie: --storage THIS/NAME"
  value       = "s3://${aws_s3_bucket.studies.bucket}/${var.prefix}"
}

output "queue" {
  description = "The job queue."
  value       = aws_batch_job_queue.this.name
}

output "definition" {
  description = "The job definition."
  value       = aws_batch_job_definition.worker.name
}

output "log_group" {
  description = "The group of the jobs' logs."
  value       = aws_cloudwatch_log_group.jobs.name
}

output "submit_policy" {
  description = "The policy for whoever submits."
  value       = aws_iam_policy.submit.arn
}
