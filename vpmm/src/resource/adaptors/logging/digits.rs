//! Digits of numbers, eight or sixteen at a time: the lanes of one word, without a loop or a table.

/// The first number that [`decimal`] has no room for.
pub(super) const EIGHT_DIGITS: u64 = 100_000_000;

/// The digit 0, eight times.
pub(super) const ZEROS: u64 = u64::from_le_bytes(*b"00000000");

/// The last eight decimal digits of a number, zeros in front.
#[inline]
pub(super) fn decimal(number: u64) -> [u8; 8] {
    let number = number % EIGHT_DIGITS;
    // Two lanes of four digits, the front one lowest: that is where the text begins.
    let fours = (number / 10_000) | ((number % 10_000) << 32);
    // Hundredths by a multiplication: exact below 10,000, and no lane reaches into the next.
    let hundreds = ((fours * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = hundreds | ((fours - hundreds * 100) << 16);
    // Tenths likewise: exact below 100.
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    let ones = tens | ((twos - tens * 10) << 8);
    (ones | ZEROS).to_le_bytes()
}

/// The sixteen hexadecimal digits of a number.
#[inline]
pub(super) fn hexadecimal(number: u64) -> [u8; 16] {
    let [front, back] = [number >> 32, number & 0xffff_ffff].map(eight_hexadecimal);
    (u128::from(front) | (u128::from(back) << 64)).to_le_bytes()
}

/// Those of 32 bits, as text in a word.
#[inline]
fn eight_hexadecimal(number: u64) -> u64 {
    // The front digit lowest, by halves: bytes, each in a lane of two, then their digits.
    let bytes = u64::from((number as u32).swap_bytes());
    let pairs = (bytes | (bytes << 16)) & 0x0000_ffff_0000_ffff;
    let lanes = (pairs | (pairs << 8)) & 0x00ff_00ff_00ff_00ff;
    let digits = ((lanes >> 4) & 0x000f_000f_000f_000f) | ((lanes & 0x000f_000f_000f_000f) << 8);
    // A digit above 9 carries into the fifth bit when 6 is added; the letters are 39 further on.
    let letters = ((digits + 0x0606_0606_0606_0606) >> 4) & 0x0101_0101_0101_0101;
    digits + ZEROS + letters * u64::from(b'a' - b'0' - 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_of_four_digits_is_right() {
        for group in 0..10_000 {
            let number = group * 10_000 + (9_999 - group);
            assert_eq!(decimal(number), format!("{number:08}").as_bytes());
        }
        assert_eq!(decimal(EIGHT_DIGITS + 42), *b"00000042");
    }

    #[test]
    fn every_byte_is_right_in_every_place() {
        for byte in 0..=255_u64 {
            for place in 0..8 {
                let number = (byte << (8 * place)) | (0x5a << (8 * ((place + 1) % 8)));
                assert_eq!(hexadecimal(number), format!("{number:016x}").as_bytes());
            }
        }
    }
}
