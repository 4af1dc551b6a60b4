"""What every package may use and no user needs: files, locks, extras, events, warnings' places."""
