//! A throw-away CA with one certificate for servers and one for agents.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Paths of the PEM files.
pub(crate) struct Certs {
    pub(crate) ca: PathBuf,
    pub(crate) server_cert: PathBuf,
    pub(crate) server_key: PathBuf,
    pub(crate) agent_cert: PathBuf,
    pub(crate) agent_key: PathBuf,
}

impl Certs {
    /// Creates the certificates and keys in a directory.
    pub(crate) fn write(dir: &Path) -> Self {
        let ca_key = KeyPair::generate().expect("a key can be made");
        let mut params = CertificateParams::new(Vec::new()).expect("no names, no bad name");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        params
            .distinguished_name
            .push(DnType::CommonName, "interop test CA");
        let ca = params.self_signed(&ca_key).expect("the CA can sign itself");
        let issuer = Issuer::new(params, ca_key);

        let at = |name: &str| dir.join(name);
        let certs = Self {
            ca: at("ca.pem"),
            server_cert: at("server.pem"),
            server_key: at("server.key"),
            agent_cert: at("agent.pem"),
            agent_key: at("agent.key"),
        };
        write(&certs.ca, &ca.pem());
        leaf(
            &issuer,
            "server",
            ExtendedKeyUsagePurpose::ServerAuth,
            &certs.server_cert,
            &certs.server_key,
        );
        leaf(
            &issuer,
            "agent",
            ExtendedKeyUsagePurpose::ClientAuth,
            &certs.agent_cert,
            &certs.agent_key,
        );
        certs
    }
}

fn leaf(
    issuer: &Issuer<'_, KeyPair>,
    name: &str,
    usage: ExtendedKeyUsagePurpose,
    cert: &Path,
    key: &Path,
) {
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let mut params = CertificateParams::new(names).expect("the names are good");
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![usage];
    let pair = KeyPair::generate().expect("a key can be made");
    let signed = params.signed_by(&pair, issuer).expect("the CA can sign");
    write(cert, &signed.pem());
    write(key, &pair.serialize_pem());
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("writing {}: {error}", path.display()));
}
