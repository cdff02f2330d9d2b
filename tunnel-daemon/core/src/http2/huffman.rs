//! The Huffman code of HPACK (RFC 7541, appendix B), decoding only.
//!
//! The code is canonical: sorted by length, then by symbol, codes count upwards. So the code lengths define the table;
//! the rest is computed at compile time.

/// The end-of-string symbol: padding is a prefix of this code; the whole code is an error.
const EOS: u16 = 256;
/// Bits of the shortest and of the longest code.
const BITS_MIN: usize = 5;
const BITS_MAX: usize = 30;

/// Code length in bits of every octet, then of [`EOS`].
#[rustfmt::skip]
const BITS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

/// The codes of one length: `first`, `first + 1`, ... for the symbols from `SYMBOLS[at]` on.
#[derive(Clone, Copy)]
struct Row {
    first: u32,
    count: u32,
    at: usize,
}

const SYMBOLS: [u16; 257] = sorted_symbols();
const ROWS: [Row; BITS_MAX + 1] = rows();

const fn sorted_symbols() -> [u16; 257] {
    let mut sorted = [0; 257];
    let mut at = 0;
    let mut bits = BITS_MIN;
    while bits <= BITS_MAX {
        let mut symbol = 0;
        while symbol <= EOS {
            if BITS[symbol as usize] as usize == bits {
                sorted[at] = symbol;
                at += 1;
            }
            symbol += 1;
        }
        bits += 1;
    }
    sorted
}

const fn rows() -> [Row; BITS_MAX + 1] {
    let mut rows = [Row {
        first: 0,
        count: 0,
        at: 0,
    }; BITS_MAX + 1];
    let mut next_code = 0;
    let mut at = 0;
    let mut bits = BITS_MIN;
    while bits <= BITS_MAX {
        let mut count = 0;
        while at + (count as usize) < SYMBOLS.len()
            && BITS[SYMBOLS[at + count as usize] as usize] as usize == bits
        {
            count += 1;
        }
        rows[bits] = Row {
            first: next_code,
            count,
            at,
        };
        next_code = (next_code + count) << 1;
        at += count as usize;
        bits += 1;
    }
    rows
}

/// Invalid Huffman code: a code that does not exist, a whole [`EOS`], or padding that is too long or not all ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BadCode;

/// Decodes `coded`, handing each octet to `take`.
pub(super) fn decode(coded: &[u8], mut take: impl FnMut(u8)) -> Result<(), BadCode> {
    let mut window: u64 = 0; // The unread bits: the low `held` bits, oldest first.
    let mut held = 0;
    let mut rest = coded.iter();
    loop {
        while held <= 32 {
            let Some(&byte) = rest.next() else { break };
            window = (window << 8) | u64::from(byte);
            held += 8;
        }
        match next_symbol(window, held) {
            Some((symbol, used)) => {
                take(u8::try_from(symbol).map_err(|_eos| BadCode)?);
                held -= used;
                window &= (1 << held) - 1;
            }
            None if held < 8 && window == (1 << held) - 1 => return Ok(()),
            None => return Err(BadCode),
        }
    }
}

/// The first symbol in the `held` low bits of `window` and its code length; `None` if the code is incomplete.
fn next_symbol(window: u64, held: usize) -> Option<(u16, usize)> {
    (BITS_MIN..=BITS_MAX.min(held)).find_map(|bits| {
        let row = ROWS[bits];
        let code = u32::try_from(window >> (held - bits)).ok()?;
        let nth = code.checked_sub(row.first).filter(|&nth| nth < row.count)?;
        Some((SYMBOLS[row.at + usize::try_from(nth).ok()?], bits))
    })
}

/// Code and length in bits of one octet, for the test encoder.
#[cfg(test)]
pub(super) fn code_of(octet: u8) -> (u32, usize) {
    let bits = usize::from(BITS[usize::from(octet)]);
    let row = ROWS[bits];
    let nth = SYMBOLS[row.at..]
        .iter()
        .position(|&symbol| symbol == u16::from(octet))
        .unwrap();
    (row.first + u32::try_from(nth).unwrap(), bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(coded: &[u8]) -> Result<Vec<u8>, BadCode> {
        let mut out = Vec::new();
        decode(coded, |octet| out.push(octet)).map(|()| out)
    }

    #[test]
    fn published_examples_decode() {
        // RFC 7541, C.4.1 and C.6.1.
        let example = [
            0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
        ];
        assert_eq!(decoded(&example).unwrap(), b"www.example.com");
        assert_eq!(decoded(&[0x64, 0x02]).unwrap(), b"302");
        assert_eq!(decoded(&[]).unwrap(), b"");
    }

    #[test]
    fn codes_derived_from_lengths_match_rfc_7541() {
        // RFC 7541, appendix B: first and last code of several lengths.
        for (octet, code) in [
            (b'0', (0x0, 5)),
            (b't', (0x9, 5)),
            (b'Z', (0xfd, 8)),
            (b'?', (0x3fc, 10)),
        ] {
            assert_eq!(code_of(octet), code);
        }
        assert_eq!(
            (code_of(0), code_of(10), code_of(22)),
            ((0x1ff8, 13), (0x3fff_fffc, 30), (0x3fff_fffe, 30))
        );
    }

    #[test]
    fn wrong_padding_is_refused() {
        assert_eq!(decoded(&[0xff]), Err(BadCode), "a whole octet of padding");
        assert_eq!(decoded(&[0b0000_0000]), Err(BadCode), "padding of zeros");
        assert_eq!(
            decoded(&[0xff, 0xff, 0xff, 0xff]),
            Err(BadCode),
            "end of string inside"
        );
    }
}
