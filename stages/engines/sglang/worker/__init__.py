"""What runs in SGLang's interpreter: nothing of ours, nothing of ours needed."""
