//! SHA256SUMS over all artefacts, and its signature.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use sha2::{Digest as _, Sha256};

use super::{TOOL, names};
use crate::steps::run_command;
use crate::workspace::fresh;

/// The list, as `sha256sum --check` reads it.
pub(super) const FILE: &str = "SHA256SUMS";
/// 64 bytes of ed25519 over the list.
const SIGNATURE: &str = "SHA256SUMS.sig";

/// A private key: ed25519, PEM.
pub(crate) struct Key(PathBuf);

impl Key {
    /// The key in a file.
    pub(crate) fn of(file: &Path) -> Self {
        Self(file.to_path_buf())
    }

    /// A new one, for a trial.
    pub(crate) fn throwaway(folder: &Path) -> anyhow::Result<Self> {
        let file = folder.join("throwaway.pem");
        let mut openssl = openssl(&["genpkey", "-algorithm", "ed25519", "-out"]);
        run_command(openssl.arg(&file), TOOL)?;
        Ok(Self(file))
    }

    /// Writes its public half.
    pub(crate) fn public(&self, file: &Path) -> anyhow::Result<()> {
        let mut openssl = openssl(&["pkey", "-pubout", "-in"]);
        run_command(openssl.arg(&self.0).arg("-out").arg(file), TOOL)
    }
}

fn openssl(args: &[&str]) -> Command {
    let mut command = Command::new("openssl");
    command.args(args);
    command
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn of_file(file: &Path) -> anyhow::Result<String> {
    let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    Ok(of_bytes(&bytes))
}

/// SHA-256, in hexadecimal.
pub(super) fn of_bytes(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// Writes the list of all files in a folder.
///
/// # Errors
/// One cannot be read.
pub(crate) fn write(folder: &Path) -> anyhow::Result<()> {
    let mut list = String::new();
    for name in names(folder)? {
        if !name.starts_with(FILE) {
            list.push_str(&format!("{}  {name}\n", of_file(&folder.join(&name))?));
        }
    }
    fs::write(folder.join(FILE), list).context("write the list of sums")
}

/// Signs the list.
///
/// # Errors
/// The key cannot be read, or is none of ed25519.
pub(crate) fn sign(folder: &Path, key: &Key) -> anyhow::Result<()> {
    let mut openssl = openssl(&["pkeyutl", "-sign", "-rawin", "-inkey"]);
    openssl
        .arg(&key.0)
        .arg("-in")
        .arg(folder.join(FILE))
        .arg("-out")
        .arg(folder.join(SIGNATURE));
    run_command(&mut openssl, TOOL)?;
    let bytes = fs::metadata(folder.join(SIGNATURE))?.len();
    ensure!(
        bytes == 64,
        "{} is no key of ed25519: its signature has {bytes} bytes",
        key.0.display()
    );
    Ok(())
}

/// Verifies list and signature with the commands that the documentation names.
///
/// # Errors
/// One of them refuses.
pub(crate) fn verify(folder: &Path, public: &Path) -> anyhow::Result<()> {
    let mut openssl = openssl(&["pkeyutl", "-verify", "-pubin", "-rawin", "-inkey"]);
    openssl
        .current_dir(folder)
        .arg(fs::canonicalize(public)?)
        .args(["-in", FILE, "-sigfile", SIGNATURE]);
    run_command(&mut openssl, TOOL)?;
    let mut check = Command::new("sha256sum");
    check.args(["--check", "--strict", "--quiet", FILE]);
    run_command(check.current_dir(folder), TOOL)
}

/// Signs copies of list and artefacts with a new key, verifies them, and sees that a changed byte is found.
pub(super) fn check(out: &Path, trial: &Path) -> anyhow::Result<()> {
    let copy = trial.join("sums");
    fresh(&copy)?;
    let key = Key::throwaway(trial)?;
    let public = trial.join("throwaway.pub");
    key.public(&public)?;
    for name in names(out)? {
        fs::copy(out.join(&name), copy.join(&name))?;
    }
    sign(&copy, &key)?;
    verify(&copy, &public)?;
    let name = names(&copy)?.pop().context("a file")?;
    for name in [name.as_str(), FILE] {
        let file = copy.join(name);
        let sound = fs::read(&file)?;
        let mut bytes = sound.clone();
        if let Some(byte) = bytes.first_mut() {
            *byte ^= 1;
        }
        fs::write(&file, bytes)?;
        ensure!(
            verify(&copy, &public).is_err(),
            "a changed {name} is verified"
        );
        // Else the next one would be refused because of this one.
        fs::write(&file, sound)?;
    }
    fs::remove_dir_all(&copy)?;
    Ok(())
}
