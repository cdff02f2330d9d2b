//! Waits until a path carries bytes, the only readiness that all peers share, or until a server has an agent.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time limit of all attempts.
const LIMIT: Duration = Duration::from_secs(20);
/// Time limit of one attempt.
const TRY: Duration = Duration::from_millis(500);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until an answer contains `wanted`.
///
/// # Errors
/// None does; carries the error of the last attempt.
pub(crate) fn until(
    otherwise: &str,
    address: SocketAddr,
    question: &str,
    wanted: &str,
) -> anyhow::Result<()> {
    let end = Instant::now() + LIMIT;
    loop {
        match once(address, question, wanted) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => {
                anyhow::bail!("{otherwise} within {} s: {error}", LIMIT.as_secs())
            }
            Err(_not_yet) => std::thread::sleep(PAUSE),
        }
    }
}

/// Asks once; the answer has to begin with a piece that contains `wanted`.
fn once(address: SocketAddr, question: &str, wanted: &str) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, TRY)?;
    stream.set_read_timeout(Some(TRY))?;
    stream.write_all(question.as_bytes())?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer)?;
    let answer = String::from_utf8_lossy(answer.get(..length).unwrap_or_default());
    if answer.contains(wanted) {
        return Ok(());
    }
    Err(io::Error::other(format!("it answered {answer:?}")))
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
        assert!(once(address, "?", "?").is_err());
        closing.join().unwrap();
    }
}
