"""The admin socket of a running job. Commands speak to its launcher by it; `ftcomm dump` and
`ftcomm trace` read files."""
