//! Waits until a path carries bytes: the only readiness that every peer has.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::way::{Target, Targets};

/// How long it is tried.
const LIMIT: Duration = Duration::from_secs(20);
/// One try.
const TRY: Duration = Duration::from_millis(500);
/// Between two.
const PAUSE: Duration = Duration::from_millis(20);

/// See the module.
///
/// # Errors
/// No echo came back; the error is that of the last try.
pub(crate) fn wait(targets: &Targets) -> anyhow::Result<()> {
    let address = targets.address(Target::Echo);
    let end = Instant::now() + LIMIT;
    loop {
        match once(address) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => {
                anyhow::bail!("no echo within {} s: {error}", LIMIT.as_secs())
            }
            Err(_not_yet) => std::thread::sleep(PAUSE),
        }
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
    fn peer_that_takes_connections_and_drops_them_is_not_ready() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let closing = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(once(address).is_err());
        closing.join().unwrap();
    }
}
