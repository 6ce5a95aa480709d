"""flatmin in other people's trainers. Each file imports its framework; importing flatmin imports none of them."""
