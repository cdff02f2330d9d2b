//! Certificates of servers that know each other.

use std::path::PathBuf;

use adit_tls::pki::{self, Authority, Wanted};
use adit_tls::selfsigned::Usage;
use tempfile::TempDir;

/// The authority of peers.
pub struct PeerFiles(TempDir);

impl PeerFiles {
    /// A new authority.
    #[expect(clippy::new_without_default, reason = "it writes files")]
    pub fn new() -> Self {
        let files = Self(TempDir::new().expect("a directory"));
        pki::init(files.0.path(), 30).expect("an authority");
        files
    }

    /// The flags with which a server is one of this authority's peers. Issues its certificate.
    pub fn flags(&self, name: &str) -> Vec<String> {
        self.flags_of(name, Authority::Peers, Usage::Peer)
    }

    /// Certificate and key of a peer, which are issued the first time.
    pub fn pair(&self, name: &str) -> (PathBuf, PathBuf) {
        let pair = (self.file(name, "crt"), self.file(name, "key"));
        if !pair.0.exists() {
            let _flags = self.flags(name);
        }
        pair
    }

    /// The authority of peers.
    pub fn ca(&self) -> PathBuf {
        self.file("peers-ca", "crt")
    }

    /// As [`Self::flags`], with a certificate of another authority or usage.
    pub fn flags_of(&self, name: &str, authority: Authority, usage: Usage) -> Vec<String> {
        let wanted = Wanted {
            stem: name.to_owned(),
            authority,
            usage,
            common_name: name.to_owned(),
            names: vec!["127.0.0.1".to_owned(), "localhost".to_owned()],
        };
        pki::issue(self.0.path(), 30, &[wanted]).expect("a certificate");
        vec![
            format!("--peer-cert={}", self.file(name, "crt").display()),
            format!("--peer-key={}", self.file(name, "key").display()),
            format!("--peer-ca-cert={}", self.ca().display()),
        ]
    }

    fn file(&self, stem: &str, ending: &str) -> PathBuf {
        self.0.path().join(format!("{stem}.{ending}"))
    }
}
