//! A target that reports its caller's address.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};

/// Listens on loopback until the process ends. It sends the caller's address and a line break, then echoes.
pub(crate) fn target(at: &str) -> SocketAddr {
    let listener = TcpListener::bind((at, 0)).expect("loopback is up");
    let address = listener.local_addr().expect("bound");
    serve(listener);
    address
}

/// As [`target`], on an existing listener.
pub(crate) fn serve(listener: TcpListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            std::thread::spawn(move || {
                let Ok(peer) = stream.peer_addr() else { return };
                let _gone = writeln!(stream, "{peer}");
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..read]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}
