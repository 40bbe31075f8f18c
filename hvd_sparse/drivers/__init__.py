"""What moves the bytes. The only package that communicates; an algorithm never knows which driver runs it."""
