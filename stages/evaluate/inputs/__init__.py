"""What engines are asked: samples, their tokens, and who judges an answer."""
