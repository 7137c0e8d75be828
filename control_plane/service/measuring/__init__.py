"""What is known of tasks: from probes, profiles and earlier runs."""
