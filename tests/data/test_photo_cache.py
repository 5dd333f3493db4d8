import threading

import pytest
import torch

from bytesplat_ns.photos.cache import GIB, Photo, PhotoCache, default_budget

BYTES = 4 * 6 * 3


class Decoder:
    """Decodes photo i to constant colour i and counts how often."""

    def __init__(self):
        self.calls = []
        self.lock = threading.Lock()

    def __call__(self, index):
        with self.lock:
            self.calls.append(index)
        return Photo(torch.full((4, 6, 3), index, dtype=torch.uint8))


def cache(count, budget, decoder, **options):
    return PhotoCache(decoder, [BYTES] * count, "cpu", budget, workers=2, **options)


def test_all_are_decoded_once_where_they_fit():
    decoder = Decoder()
    photos = cache(10, 10 * BYTES, decoder)
    assert photos.complete
    assert list(photos.fill(range(10))) == list(range(10))
    for _ in range(2):
        assert [int(photos[i].image[0, 0, 0]) for i in range(10)] == list(range(10))
    assert sorted(decoder.calls) == list(range(10))


def test_a_fixed_part_is_kept_where_they_do_not_fit():
    decoder = Decoder()
    photos = cache(10, 4 * BYTES + 5, decoder)
    assert not photos.complete
    order = [3, 1, 9, 0, 2, 4, 5, 6, 7, 8]
    for index in order:
        photos[index]
    decoder.calls.clear()
    for index in reversed(order):
        assert int(photos[index].image[0, 0, 0]) == index
    assert sorted(decoder.calls) == [2, 4, 5, 6, 7, 8]


def test_zero_budget_keeps_nothing():
    decoder = Decoder()
    photos = cache(2, 0, decoder)
    photos[0], photos[0]
    assert decoder.calls == [0, 0]


def test_prefetched_photos_are_not_decoded_again():
    decoder = Decoder()
    photos = cache(4, 0, decoder)
    photos.prefetch([2, 3])
    photos.prefetch([3])
    assert int(photos[3].image[0, 0, 0]) == 3
    assert int(photos[2].image[0, 0, 0]) == 2
    assert sorted(decoder.calls) == [2, 3]


def test_fill_decodes_a_few_photos_ahead_only():
    """All at once could take more host memory than there is, where photos are kept on a device."""
    decoder = Decoder()
    photos = cache(100, 100 * BYTES, decoder)
    next(photos.fill(range(len(photos))))
    photos._pool.shutdown()  # waits for what was begun
    assert len(decoder.calls) == 4  # twice the number of workers


def test_a_failed_decode_reaches_the_caller():
    def fail(index):
        raise ValueError(f"photo {index} is broken")

    with pytest.raises(ValueError, match="photo 0 is broken"):
        list(cache(3, 10 * BYTES, fail).fill(range(3)))


def test_describe_says_how_much_goes_where():
    assert cache(10, 10 * BYTES, None).describe().endswith("all kept in host memory (budget 0.00 GiB)")
    assert "40% kept in host memory" in cache(10, 4 * BYTES, None).describe()
    assert "decoded at each use" in cache(10, 4 * BYTES, None).describe()
    assert cache(0, 0, None).describe().startswith("0 photos of 0.0 MiB: all kept")


def test_default_budget_is_within_this_machine():
    assert 0 < default_budget(torch.device("cpu")) < 2**16 * GIB


def test_photo_downscales_image_and_mask_alike():
    photo = Photo(torch.zeros(5, 7, 4, dtype=torch.uint8), torch.ones(5, 7, dtype=torch.uint8))
    assert photo.nbytes == 5 * 7 * 5
    half = photo.downscale(2)
    assert half.image.shape == (2, 3, 4)
    assert half.mask.shape == (2, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("budget", "host_only", "place"), [(10, False, "cuda"), (10, True, "cpu"), (9, False, "cpu")])
def test_photos_stay_on_the_gpu_if_all_fit(budget, host_only, place):
    photos = PhotoCache(Decoder(), [BYTES] * 10, "cuda", budget * BYTES, host_only)
    assert photos.place.type == place
    assert photos[0].image.device.type == "cuda"
