# One image for all processes of tidewheel; the command chooses which: scheduler, projector, api, worker, …
FROM python:3.12-slim AS build
WORKDIR /source
RUN python -m venv /opt/tidewheel
# What the app of a worker needs besides; Pillow is what the sample app makes thumbnails with.
ARG APP_PACKAGES="pillow"
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY scheduler scheduler
COPY workers workers
COPY cron cron
COPY infra infra
COPY tidewheel tidewheel
RUN /opt/tidewheel/bin/pip install --no-cache-dir . ${APP_PACKAGES}

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 tidewheel
COPY --from=build /opt/tidewheel /opt/tidewheel
ENV PATH=/opt/tidewheel/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# An app is found in the folder where the process runs.
WORKDIR /app
USER tidewheel
EXPOSE 8420 8421
ENTRYPOINT ["tidewheel"]
CMD ["--help"]
