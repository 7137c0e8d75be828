"""Updates and files between sites: offered, sent in resumable pieces, verified, durable before they are
acknowledged."""
