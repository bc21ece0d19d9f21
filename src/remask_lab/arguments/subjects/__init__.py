"""The options of each subject of `remask analyze`: one file a subject, beside its line in the help and its examples."""
