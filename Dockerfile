# A run, or the web page, on a machine with a card: docker run --gpus all -v "$PWD:/work" IMAGE train recipe.yaml
# The runtime of CUDA has the driver's libraries; torch brings the others.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# A C compiler, since Triton builds its launchers with it
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3=3.12.* python3-venv=3.12.* python3-dev=3.12.* gcc=4:13.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 chronicals \
    && install --directory --owner chronicals /opt/chronicals /work

USER 10001
ENV PATH=/opt/chronicals/bin:$PATH PIP_NO_CACHE_DIR=1
COPY --chown=10001 pyproject.toml constraints.txt README.md LICENSE /tmp/source/
COPY --chown=10001 src /tmp/source/src
RUN python3 -m venv /opt/chronicals \
    && python -m pip install --quiet --constraint /tmp/source/constraints.txt "/tmp/source[flash,peft,export,ui]" \
    && rm -rf /tmp/source

WORKDIR /work
EXPOSE 8321
HEALTHCHECK --interval=5m --timeout=2m --start-period=1m CMD ["chronicals", "doctor", "--no-self-test"]
ENTRYPOINT ["chronicals"]
CMD ["--help"]
