//! Free ports inside the range that upstream's flag check allows (1024 to 49151).

use std::net::TcpListener;
use std::process;
use std::sync::Mutex;

/// Below the kernel's ephemeral range (32768 up), so that outgoing connections do not take them.
const FIRST: u16 = 20_000;
const LAST: u16 = 32_000;

static NEXT: Mutex<Option<u16>> = Mutex::new(None);

/// A port that nobody listens on now and that this process hands out only once per round.
///
/// Two test processes begin at different places, by process id.
pub(crate) fn free() -> u16 {
    let mut next = NEXT.lock().expect("no holder of the port counter panics");
    let span = u32::from(LAST - FIRST);
    let mut port = next.unwrap_or_else(|| {
        let offset = process::id().wrapping_mul(97) % span;
        FIRST + u16::try_from(offset).expect("the span fits a port")
    });
    for _ in FIRST..LAST {
        port = if port + 1 >= LAST { FIRST } else { port + 1 };
        if TcpListener::bind(("0.0.0.0", port)).is_ok()
            && TcpListener::bind(("127.0.0.1", port)).is_ok()
        {
            *next = Some(port);
            return port;
        }
    }
    panic!("no free port between {FIRST} and {LAST}");
}
