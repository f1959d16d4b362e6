"""The data sets whose rows areal can convert."""

from areal.api.registry import register

register("datasets", "gsm8k", "areal.data.dataset:gsm8k_row")
register("datasets", "clevr_count_70k", "areal.data.dataset:clevr_count_row")
register("datasets", "geometry3k", "areal.data.dataset:geometry3k_row")
register("datasets", "virl39k", "areal.data.dataset:virl39k_row")
