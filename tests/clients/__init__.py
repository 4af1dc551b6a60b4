"""Programs of other libraries with and without precast, and the integrations, in an environment of their own."""
