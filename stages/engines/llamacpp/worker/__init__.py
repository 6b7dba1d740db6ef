"""What runs in llama.cpp's interpreter: nothing of ours, nothing of ours needed."""
