//! Dials at a steady rate, and their results.

use std::io::{self, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::namespace::BODY;
use crate::server::ask;
use crate::wait::until;

const A_SECOND: u32 = 50;
/// Timeout of a dial and its answer.
const LIMIT: Duration = Duration::from_secs(30);

/// A server's socket for clients, and its health port.
#[derive(Clone)]
pub(crate) struct Frontend {
    pub(crate) socket: PathBuf,
    pub(crate) health: u16,
}

/// Duration, and the error if the dial failed.
type Dial = (Duration, Result<(), String>);

/// Dials that continue until [`Self::stop`].
pub(crate) struct Load {
    stopping: Arc<AtomicBool>,
    results: Arc<Mutex<Vec<Dial>>>,
    pacer: JoinHandle<()>,
}

impl Load {
    /// Sends CONNECTs for the pod at this address, to the frontends in turn. As a load balancer, it skips servers that are
    /// not ready.
    pub(crate) fn start(frontends: Vec<Frontend>, address: Ipv4Addr) -> Self {
        let stopping = Arc::new(AtomicBool::new(false));
        let results = Arc::new(Mutex::new(Vec::new()));
        let (stop, collected) = (Arc::clone(&stopping), Arc::clone(&results));
        let pacer = thread::spawn(move || {
            let began = Instant::now();
            let mut dials = Vec::new();
            for turn in 0_usize.. {
                if stop.load(Relaxed) {
                    break;
                }
                let due = Duration::from_secs(1) / A_SECOND * u32::try_from(turn).expect("few");
                thread::sleep(due.saturating_sub(began.elapsed()));
                let (frontends, collected) = (frontends.clone(), Arc::clone(&collected));
                dials.push(thread::spawn(move || {
                    let began = Instant::now();
                    let outcome = through(&frontends, turn, address);
                    collected
                        .lock()
                        .expect("no panic")
                        .push((began.elapsed(), outcome));
                }));
            }
            for dial in dials {
                dial.join().expect("no panic");
            }
        });
        Self {
            stopping,
            results,
            pacer,
        }
    }

    /// Waits for two seconds' worth of additional dials.
    pub(crate) fn go_on(&self) {
        let count = || self.results.lock().expect("no panic").len();
        let before = count();
        until("further dials", LIMIT, || {
            (count() >= before + 100).then_some(())
        });
    }

    /// Ends the dials. Prints their number, the failures and the slowest. Panics if more than this share failed.
    pub(crate) fn stop(self, what: &str, share: f64) {
        self.stopping.store(true, Relaxed);
        self.pacer.join().expect("no panic");
        let mut results = self.results.lock().expect("no panic");
        results.sort_unstable_by_key(|(took, _)| *took);
        let failures: Vec<&str> = results
            .iter()
            .filter_map(|(_, outcome)| outcome.as_ref().err().map(String::as_str))
            .collect();
        let (all, slowest) = (results.len(), results.last().map(|(took, _)| *took));
        println!(
            "MEASURED {what}: {all} dials, {} failed, slowest {slowest:?}; {:?}",
            failures.len(),
            failures.iter().take(3).collect::<Vec<_>>()
        );
        assert!(all > 50, "{all} dials");
        assert!(
            failures.len() as f64 <= share * all as f64,
            "too many have failed"
        );
    }
}

fn through(frontends: &[Frontend], turn: usize, address: Ipv4Addr) -> Result<(), String> {
    let mut in_turn = (0..frontends.len()).map(|step| &frontends[(turn + step) % frontends.len()]);
    let frontend = in_turn
        .find(|frontend| ask(frontend.health, "/readyz").is_ok())
        .ok_or("no server is ready")?;
    let answer = connect(&frontend.socket, address).map_err(|error| error.to_string())?;
    if answer.ends_with(&format!("{BODY}{address}")) {
        Ok(())
    } else {
        Err(answer)
    }
}

/// Sends a request to the pod through a tunnel. Returns its answer, or the answer to a failed CONNECT.
pub(crate) fn connect(socket: &Path, address: Ipv4Addr) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let asking = format!("CONNECT {address}:8080 HTTP/1.1\r\nHost: {address}:8080\r\n\r\n");
    stream.write_all(asking.as_bytes())?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte)? == 0 {
            break;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut answer = String::new();
    if head.contains(" 200 ") {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")?;
    } else {
        answer.push_str(&head);
    }
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
