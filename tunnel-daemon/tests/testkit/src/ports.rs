//! Free ports in the range that upstream's flag check permits (1024 to 49151).

use std::fs::{self, File, OpenOptions, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::process;
use std::sync::Mutex;

/// The range is below the kernel's ephemeral ports (32768 and up), so outgoing connections do not take these ports.
const FIRST: u16 = 20_000;
const LAST: u16 = 32_000;

/// The last port that was returned, and the lock files of all returned ports.
static GIVEN: Mutex<(Option<u16>, Vec<File>)> = Mutex::new((None, Vec::new()));

/// A port on which nothing listens, reserved until this process ends. Tests run in several processes, so a locked file
/// reserves each port.
pub fn free() -> u16 {
    let mut given = GIVEN.lock().expect("no holder of the ports panics");
    let span = u32::from(LAST - FIRST);
    let mut port = given.0.unwrap_or_else(|| {
        let offset = process::id().wrapping_mul(97) % span;
        FIRST + u16::try_from(offset).expect("the span fits a port")
    });
    for _ in FIRST..LAST {
        port = if port + 1 >= LAST { FIRST } else { port + 1 };
        let Some(lock) = lock(port) else { continue };
        if TcpListener::bind(("0.0.0.0", port)).is_ok()
            && TcpListener::bind(("127.0.0.1", port)).is_ok()
        {
            given.0 = Some(port);
            given.1.push(lock);
            return port;
        }
    }
    panic!("no free port between {FIRST} and {LAST}");
}

/// Locks a port; `None` if another process holds it. Files of other users can be locked, too.
fn lock(port: u16) -> Option<File> {
    let folder = std::env::temp_dir().join("adit-tests-ports");
    if fs::create_dir(&folder).is_ok() {
        // World-writable and sticky, as the folder above: tests of other users lock ports there, too.
        let open_to_all = Permissions::from_mode(0o1777);
        fs::set_permissions(&folder, open_to_all).expect("it is ours");
    }
    let path = folder.join(port.to_string());
    let made = OpenOptions::new().append(true).create(true).open(&path);
    let file = made.or_else(|_not_ours| File::open(&path)).ok()?;
    file.try_lock().is_ok().then_some(file)
}
