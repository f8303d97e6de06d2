"""What a cluster costs: components counted and priced."""
