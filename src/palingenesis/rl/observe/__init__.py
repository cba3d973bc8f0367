"""What a run tells its user: metrics, the console, the files under `train.output_dir`, and where the time went."""
