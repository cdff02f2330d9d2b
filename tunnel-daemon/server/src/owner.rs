//! The hash by which servers compare whose agents they have, without naming them.

use aws_lc_rs::digest::{SHA256, digest};

/// Hash of what an agent has proved; never 0, which means that agents differ.
#[must_use]
pub fn owner_hash(principal: Option<&str>) -> u64 {
    // Nothing proved is no principal's name.
    let named = principal.map(|principal| format!("p{principal}"));
    let hash = digest(&SHA256, named.as_deref().unwrap_or_default().as_bytes());
    let first = hash.as_ref().first_chunk().copied().unwrap_or_default();
    u64::from_be_bytes(first).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_have_different_hashes_and_none_is_one_of_them() {
        let hashes = [None, Some(""), Some("CN=a"), Some("CN=b")].map(owner_hash);
        for (at, hash) in hashes.iter().enumerate() {
            assert_ne!(*hash, 0);
            assert!(!hashes[..at].contains(hash), "{at}");
        }
        assert_eq!(owner_hash(Some("CN=a")), owner_hash(Some("CN=a")));
    }
}
