"""The application that the fake uvicorn serves."""
