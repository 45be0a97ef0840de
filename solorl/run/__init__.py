"""What one training needs."""
