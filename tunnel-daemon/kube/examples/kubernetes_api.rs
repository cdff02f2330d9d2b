//! The stand-in of the tests for the Kubernetes API, as a process: `cargo xtask monitoring` counts leases at it.
//!
//! It is down and up in turn, so that clients, which list leases every 15 s, meet each, and two lists of each while it is up:
//! only then an expired lease is deleted. From the start it has such a lease, and one that no client may delete.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use support::{FakeApi, Fault};

/// How long it is down, and up.
const DOWN: Duration = Duration::from_secs(15);
const UP: Duration = Duration::from_secs(35);
/// What it answers while it is down.
const UNAVAILABLE: u16 = 503;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), String> {
    let mut args = std::env::args_os().skip(1);
    let (Some(kubeconfig), None) = (args.next(), args.next()) else {
        return Err("the only argument is the kubeconfig to write".to_owned());
    };
    let api = FakeApi::start().await;
    {
        let mut state = api.state.lock().expect("the state");
        for name in ["expired", "expired-and-kept"] {
            let spec =
                json!({"renewTime": "2020-01-01T00:00:00.000000Z", "leaseDurationSeconds": 1});
            state.leases.put(name, json!({"spec": spec}));
        }
        state.leases.kept.insert("expired-and-kept".to_owned());
    }
    api.write_kubeconfig(&PathBuf::from(kubeconfig));
    loop {
        api.set_fault(Some(Fault::Answer(UNAVAILABLE, "{}".into())));
        api.state.lock().expect("the state").leases.end_watches();
        tokio::time::sleep(DOWN).await;
        api.set_fault(None);
        tokio::time::sleep(UP).await;
    }
}
