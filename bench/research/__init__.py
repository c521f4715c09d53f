"""What disturbed trainings learn, a simulated fleet, and the page of all results: experiments beside the library."""
