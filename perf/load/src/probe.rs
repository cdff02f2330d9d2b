//! Waits until a path carries bytes, the only readiness that all peers share, or until a server has an agent.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::way::{Target, Targets};

/// Time limit of all attempts.
const LIMIT: Duration = Duration::from_secs(20);
/// Time limit of one attempt.
const TRY: Duration = Duration::from_millis(500);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until an echo comes back.
///
/// # Errors
/// No echo came back; carries the error of the last attempt.
pub(crate) fn wait(targets: &Targets) -> anyhow::Result<()> {
    let address = targets.address(Target::Echo);
    until("no echo", || once(address))
}

/// Waits until `/readyz` of a server answers 200: it has an agent.
///
/// # Errors
/// The server is not ready; carries the error of the last attempt.
pub(crate) fn wait_ready(address: SocketAddr) -> anyhow::Result<()> {
    until("not ready", || ready(address))
}

fn until(otherwise: &str, tried: impl Fn() -> std::io::Result<()>) -> anyhow::Result<()> {
    let end = Instant::now() + LIMIT;
    loop {
        match tried() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => {
                anyhow::bail!("{otherwise} within {} s: {error}", LIMIT.as_secs())
            }
            Err(_not_yet) => std::thread::sleep(PAUSE),
        }
    }
}

fn ready(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, TRY)?;
    stream.set_read_timeout(Some(TRY))?;
    stream.write_all(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split_whitespace().nth(1) {
        Some("200") => Ok(()),
        status => Err(std::io::Error::other(format!(
            "/readyz was answered {status:?}"
        ))),
    }
}

fn once(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, TRY)?;
    stream.set_read_timeout(Some(TRY))?;
    stream.write_all(b"?")?;
    let mut answer = [0];
    stream.read_exact(&mut answer)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn peer_that_accepts_and_closes_connections_is_not_ready() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let closing = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(once(address).is_err());
        closing.join().unwrap();
    }
}
