"""Runs for other people and programs: folders on the Hugging Face hub, policies as ONNX files."""
