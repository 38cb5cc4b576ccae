"""Stage 5: carry a plan out on the model, by recipes or as tags under torch.compile."""
