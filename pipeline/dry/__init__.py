"""What a command would do: dry=true."""
