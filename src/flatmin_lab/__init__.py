"""The laboratory: data, models, training and reports around flatmin. It imports flatmin; flatmin never imports it."""
