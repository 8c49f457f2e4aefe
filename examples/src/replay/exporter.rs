//! The engines' metrics as Prometheus text, over the least HTTP that a scraper needs: one request a connection, one
//! connection at a time.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Bounds of the buckets of everything that is measured in seconds: 10 us to 10 s.
const BUCKETS_S: [f64; 19] =
    [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];

/// How long a scraper may take to ask, and to take the answer.
const SCRAPER_LIMIT: Duration = Duration::from_secs(2);

/// Bytes of a scraper's request at most. What is behind its first line matters to nobody.
const REQUEST_BYTES_MAX: u64 = 8 << 10;

/// How often what was measured is put into buckets, so that it does not pile up when nobody asks.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Why there are no metrics to be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExporterError {
    /// Take another address.
    #[error("cannot listen at {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Another recorder is installed.
    #[error("no recorder")]
    Recorder(#[from] BuildError),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Installs a recorder and serves it at `address` until this process ends. Returns the address, whose port is a free one if
/// 0 was asked for. Engines that start later are seen.
///
/// # Errors
///
/// [`ExporterError`].
pub fn serve(address: SocketAddr) -> Result<SocketAddr, ExporterError> {
    let listen = || -> io::Result<_> {
        let listener = TcpListener::bind(address)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    let (listener, bound) = listen().map_err(|source| ExporterError::Listen { address, source })?;
    let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BUCKETS_S)?;
    let recorded = builder.install_recorder()?;
    let for_upkeep = recorded.clone();
    let upkeep = move || {
        loop {
            thread::sleep(UPKEEP_INTERVAL);
            for_upkeep.run_upkeep();
        }
    };
    let answer_all = move || {
        for stream in listener.incoming() {
            // A scraper that goes away has only itself to blame, and comes again.
            let _ = stream.and_then(|stream| answer(stream, &recorded));
        }
    };
    let spawn =
        |name: &str, body: Box<dyn FnOnce() + Send>| thread::Builder::new().name(name.into()).spawn(body).map(drop);
    spawn("upkeep", Box::new(upkeep)).map_err(ExporterError::Thread)?;
    spawn("metrics", Box::new(answer_all)).map_err(ExporterError::Thread)?;
    Ok(bound)
}

fn answer(mut stream: TcpStream, recorded: &PrometheusHandle) -> io::Result<()> {
    stream.set_read_timeout(Some(SCRAPER_LIMIT))?;
    stream.set_write_timeout(Some(SCRAPER_LIMIT))?;
    let mut request = Vec::new();
    let mut chunk = [0; 1024];
    // All of the request is taken in, since to close a connection with some of it unread would cut off the answer.
    while !request.ends_with(b"\r\n\r\n") && (request.len() as u64) < REQUEST_BYTES_MAX {
        match stream.read(&mut chunk)? {
            0 => break,
            read => request.extend_from_slice(&chunk[..read]),
        }
    }
    let (status, body) = respond(&request, || recorded.render());
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Status and body of the answer to a request.
fn respond(request: &[u8], render: impl FnOnce() -> String) -> (&'static str, String) {
    let first = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let words: Vec<&[u8]> = first.split(|byte| *byte == b' ').collect();
    match words[..] {
        [b"GET", b"/metrics", version] if version.starts_with(b"HTTP/1.") => ("200 OK", render()),
        [b"GET", _, version] if version.starts_with(b"HTTP/1.") => ("404 Not Found", "see /metrics\n".to_owned()),
        _ => ("400 Bad Request", "GET /metrics\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_thing_can_be_got() {
        let status = |request: &str| respond(request.as_bytes(), String::new).0;
        assert_eq!(status("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"), "200 OK");
        assert_eq!(status("GET / HTTP/1.0\r\n\r\n"), "404 Not Found");
        for request in ["", "GET /metrics", "POST /metrics HTTP/1.1\r\n\r\n", "\r\n\r\n", "GET  /metrics HTTP/1.1\r\n"]
        {
            assert_eq!(status(request), "400 Bad Request", "{request:?}");
        }
    }
}
