"""What training costs on a number of ranks: predicted time, bytes and memory."""
