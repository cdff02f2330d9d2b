//! Throw-away certificates for all peers that speak TLS.

use std::fs;
use std::path::Path;

use adit_tls::selfsigned::{ThrowawayCa, Usage};
use anyhow::Context as _;

/// Names of the server that its certificate always has.
const SERVER_NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// Writes `ca.pem`, and for `server` and `agent` each `NAME.pem`, `NAME.key` and both in one as `NAME.both.pem`.
/// `names` are further names of the server. `peer` is of another CA, `peers-ca.pem`.
///
/// # Errors
/// The folder is not writable, or a key cannot be generated.
pub(crate) fn write(folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let save = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    };
    let server_names = [&SERVER_NAMES.map(str::to_owned)[..], names].concat();
    let ca = ThrowawayCa::new("load test CA")?;
    save("ca.pem", &ca.cert_pem())?;
    for (name, usage, names) in [
        ("server", Usage::Server, &server_names[..]),
        ("agent", Usage::Client, &[][..]),
    ] {
        let pair = ca.issue(usage, name, names)?;
        save(&format!("{name}.pem"), &pair.cert_pem)?;
        save(&format!("{name}.key"), &pair.key_pem)?;
        let both = pair.cert_pem + &pair.key_pem;
        save(&format!("{name}.both.pem"), &both)?;
    }
    let peers = ThrowawayCa::new("load test CA of peers")?;
    save("peers-ca.pem", &peers.cert_pem())?;
    let pair = peers.issue(Usage::Peer, "peer", &server_names)?;
    save("peer.pem", &pair.cert_pem)?;
    save("peer.key", &pair.key_pem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_are_written_and_one_holds_certificate_and_key() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &["10.9.0.1".to_owned()]).unwrap();
        for name in [
            "ca.pem",
            "server.pem",
            "server.key",
            "agent.pem",
            "agent.key",
            "peers-ca.pem",
            "peer.pem",
            "peer.key",
        ] {
            assert!(folder.path().join(name).is_file(), "{name}");
        }
        let both = fs::read_to_string(folder.path().join("agent.both.pem")).unwrap();
        assert!(both.contains("BEGIN CERTIFICATE") && both.contains("PRIVATE KEY"));
    }
}
