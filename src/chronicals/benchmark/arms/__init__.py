"""One arm a way of training; imported only in the arm's own process."""
