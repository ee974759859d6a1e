from .prophet import Prophet as Prophet
