"""A release: wheels and their index, the folder of Hugging Face's hub, the sdist, the sums."""
