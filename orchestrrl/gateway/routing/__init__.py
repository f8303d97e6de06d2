"""Which engine a request goes to: the engines as a gateway has them, its queue, and the policies that choose."""
