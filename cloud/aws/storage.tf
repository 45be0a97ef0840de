# The bucket in which studies lie: encrypted, reached by TLS only, never public.

resource "aws_s3_bucket" "studies" {
  bucket = var.bucket
}

resource "aws_s3_bucket_public_access_block" "studies" {
  bucket                  = aws_s3_bucket.studies.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "studies" {
  bucket = aws_s3_bucket.studies.id
  rule {
    object_ownership = "BucketOwnerEnforced" # no access lists: policies alone decide
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "studies" {
  bucket = aws_s3_bucket.studies.id
  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "studies" {
  bucket = aws_s3_bucket.studies.id
  rule {
    id     = "uploads-that-were-never-finished"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    effect = "Deny"
    actions = [
      "s3:*", # a refusal, so the widest is the safest
    ]
    resources = [aws_s3_bucket.studies.arn, "${aws_s3_bucket.studies.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "tls_only" {
  bucket     = aws_s3_bucket.studies.id
  policy     = data.aws_iam_policy_document.tls_only.json
  depends_on = [aws_s3_bucket_public_access_block.studies]
}
