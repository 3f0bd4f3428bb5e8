"""When recurring tasks fire. Pure: time is an argument, and the time zone data is a package of a locked version."""
