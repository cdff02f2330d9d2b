//! SHA-256 by the library that TLS uses, so that a FIPS build has no other.

use aws_lc_rs::digest::{Context, SHA256, SHA256_OUTPUT_LEN};

/// A digest in the making.
pub struct Sha256(Context);

impl Default for Sha256 {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Sha256 {
    /// Adds bytes.
    pub fn update(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.update(bytes.as_ref());
    }

    /// The digest of all bytes so far.
    #[must_use]
    pub fn finish(self) -> [u8; SHA256_OUTPUT_LEN] {
        let mut digest = [0; SHA256_OUTPUT_LEN];
        digest.copy_from_slice(self.0.finish().as_ref());
        digest
    }

    /// The digest of `bytes`.
    #[must_use]
    pub fn digest(bytes: impl AsRef<[u8]>) -> [u8; SHA256_OUTPUT_LEN] {
        let mut hash = Self::default();
        hash.update(bytes);
        hash.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-4, the example of one block.
    #[test]
    fn digest_of_abc_is_that_of_the_standard() {
        let hex: String = Sha256::digest("abc")
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(
            hex,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
