"""Where the jobs of a fleet are stored: an SQLite file on one machine, a folder with Parquet files on storage that many share."""
