"""Folders and files behind URLs (s3://, gs://, hdfs://, ftp://, …): listed, read as a stream, written and verified."""
