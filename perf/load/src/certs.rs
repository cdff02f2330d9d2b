//! Throw-away certificates for all peers that speak TLS.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};

/// Names of the server that its certificate always has.
const SERVER_NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// Writes `ca.pem`, and for `server` and `agent` each `NAME.pem`, `NAME.key` and both in one as `NAME.both.pem`.
/// `names` are further names of the server.
///
/// # Errors
/// The folder is not writable, or a key cannot be generated.
pub(crate) fn write(folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let server_names: Vec<&str> = SERVER_NAMES
        .into_iter()
        .chain(names.iter().map(String::as_str))
        .collect();
    let mut root = parameters("load test CA", &[])?;
    root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    root.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let root = CertifiedIssuer::self_signed(root, KeyPair::generate()?)?;
    save(folder, "ca.pem", &root.pem())?;
    for (name, names, usage) in [
        (
            "server",
            &server_names[..],
            ExtendedKeyUsagePurpose::ServerAuth,
        ),
        ("agent", &[][..], ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let mut params = parameters(name, names)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &root)?.pem();
        let key = key.serialize_pem();
        save(folder, &format!("{name}.pem"), &cert)?;
        save(folder, &format!("{name}.key"), &key)?;
        save(folder, &format!("{name}.both.pem"), &format!("{cert}{key}"))?;
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn parameters(common_name: &str, names: &[&str]) -> anyhow::Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    let now = std::time::SystemTime::now();
    let hour = std::time::Duration::from_secs(3600);
    params.not_before = (now - hour).into();
    params.not_after = (now + 24 * hour).into();
    Ok(params)
}

fn save(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
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
        ] {
            assert!(folder.path().join(name).is_file(), "{name}");
        }
        let both = fs::read_to_string(folder.path().join("agent.both.pem")).unwrap();
        assert!(both.contains("BEGIN CERTIFICATE") && both.contains("PRIVATE KEY"));
    }
}
