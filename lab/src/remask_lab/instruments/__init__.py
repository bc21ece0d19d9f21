"""What subjects measure with: requests that are watched pass by pass, and what is computed of them."""
