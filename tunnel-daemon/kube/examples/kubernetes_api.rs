//! The stand-in of the tests for the Kubernetes API, as a process: `cargo xtask monitoring` counts leases at it.
//!
//! It is up and down for five seconds in turn, so that clients, which list leases every 15 s, meet both. From the start it
//! has a lease that has expired, and a lease that no client may delete.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use support::{FakeApi, Fault};

/// Duration of each state.
const TURN: Duration = Duration::from_secs(5);
/// What it answers while it is down.
const DOWN: u16 = 503;

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
        api.set_fault(Some(Fault::Answer(DOWN, "{}".into())));
        api.state.lock().expect("the state").leases.end_watches();
        tokio::time::sleep(TURN).await;
        api.set_fault(None);
        tokio::time::sleep(TURN).await;
    }
}
